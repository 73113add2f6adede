"""Token embeddings, the LM head that may share their matrix, and drawing tokens from logits on a CPU.

May import linear, triton, cpp and base. The GPU's drawing kernels are in `triton/sampling`.
"""
