"""Answer questions from evidence, judge the answers, and track the cost."""
