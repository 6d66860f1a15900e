"""What each place holds of a prompt: exact from an engine's KV events, approximate from what was sent there."""
