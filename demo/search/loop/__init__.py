"""The closed loop on the search demo: the parts that phases 1 and 2 do not have."""
