"""What is wrong where a prompt scores low, and what is true of the data itself."""
