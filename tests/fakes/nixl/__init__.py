"""What `planaria.worker.kv_nixl` uses of NIXL, between processes of one user on one machine."""
