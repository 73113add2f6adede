"""What the files of embedders, rerankers and classifiers say."""
