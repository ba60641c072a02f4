"""Links carry commands and replies. One small class per way of carrying."""
