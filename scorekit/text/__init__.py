"""What every program here does with texts: checks by rules, scripts, numbers, marks of chats."""
