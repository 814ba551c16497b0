"""GGUF files: their header and tensors in ``file``, their vocabulary in ``tokenizer``."""
