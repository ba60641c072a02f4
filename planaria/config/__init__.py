"""Small frozen configurations, one concern each. `resolve.resolve` makes an EngineConfig from options and facts."""
