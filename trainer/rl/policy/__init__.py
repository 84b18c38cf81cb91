"""The model that is trained: loading, adapters, image parts, tokenizer and reference."""
