"""Which dimension of each tensor runs over tokens, and which operators keep tokens apart."""
