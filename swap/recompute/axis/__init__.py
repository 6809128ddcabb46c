"""Token axis: the dimension of each tensor that runs over tokens, and rules of the operators that keep tokens apart."""
