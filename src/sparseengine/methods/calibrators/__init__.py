"""What each method that can be calibrated measures on a model, one file each."""
