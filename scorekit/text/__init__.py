"""Text processing that all programs share: rule checks, scripts, numbers, chat marks."""
