"""The contract: behaviours with numbers, one test or more for each id."""
