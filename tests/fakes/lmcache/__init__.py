"""What `planaria.worker.kv_lmcache` uses of LMCache, with a folder (`fs://...`) as the store."""
