"""What ``plan=true`` finds out of a run that has not begun, and how it shows it."""
