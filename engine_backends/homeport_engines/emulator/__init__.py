"""An engine that computes no text and keeps true books."""
