"""The closed loop on the search demo: what it needs beside phase 1 and 2."""
