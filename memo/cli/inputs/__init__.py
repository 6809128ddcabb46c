"""What flags of several commands name: the model, the step, its sequences."""
