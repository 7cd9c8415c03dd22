"""How fast is each right backend on this card: cases, timing, choice, and the file that keeps the results."""
