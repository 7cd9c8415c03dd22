"""What only a machine without a GPU needs to run the real SGLang. Not in the wheel; see README.md here."""
