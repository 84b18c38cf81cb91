"""The closed loop: rounds of training, with data commands between them."""
