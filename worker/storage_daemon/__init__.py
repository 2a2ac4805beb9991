"""qemu-storage-daemon, started, found again, driven over QMP and ended."""
