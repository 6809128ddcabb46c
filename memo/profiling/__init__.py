"""`memo.profile`: what each layer of a model saves, computes and repeats, measured."""
