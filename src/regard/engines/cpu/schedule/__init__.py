"""From problems to kernels: schedules, lists of tiles, work groups, and launches."""
