"""Does a backend multiply right on this very card? Every check runs in a child process of its own."""
