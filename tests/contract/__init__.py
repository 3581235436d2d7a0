"""What every sparse method inherits: a toy model, a driver and the contract's twelve points."""
