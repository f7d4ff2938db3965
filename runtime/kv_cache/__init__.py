"""The paged KV cache as the scheduler sees it: blocks, their owners, and how many there are."""
