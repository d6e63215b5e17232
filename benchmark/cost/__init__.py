"""What hardware allows: shapes of models, what devices do at best, floors, and how long steps take."""
