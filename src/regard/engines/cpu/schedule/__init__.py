"""Work between problems and kernels: schedules, tiles, work groups, launches."""
