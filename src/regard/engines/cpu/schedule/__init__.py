"""Work between problems and kernels: schedules, lists of tiles, work groups, and launches."""
