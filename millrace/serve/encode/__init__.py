"""Texts in, numbers out: reranking (Cohere's and Jina's shapes), scores of pairs and classes (vLLM's shapes)."""
