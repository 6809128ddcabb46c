"""What this machine has and can do: links, disks, host memory, this node's share, limits of its kernels."""
