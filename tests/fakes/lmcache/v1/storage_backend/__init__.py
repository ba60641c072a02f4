"""See lmcache."""
