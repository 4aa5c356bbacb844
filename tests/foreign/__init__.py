"""Other projects' own tests of locks, run against ours, as they are installed. The locks are adapted, not the tests."""
