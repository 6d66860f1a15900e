"""What the proxy shows of itself: metrics, tracing, decision log, dashboard."""
