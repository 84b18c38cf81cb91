"""From a request to the model and back: admission, tokenising, batches, the model thread."""
