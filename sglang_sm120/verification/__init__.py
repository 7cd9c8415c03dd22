"""Is what a running server computes right? One call of a backend: judged, kept in a file, run again alone."""
