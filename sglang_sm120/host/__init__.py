"""The only room that knows SGLang: where it is hooked, how the hooks are checked, installed and verified."""
