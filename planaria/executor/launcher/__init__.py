"""Launchers start ranks. One small class per way of starting."""
