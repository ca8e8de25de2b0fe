"""The parts of steps on workers and on the scheduler."""
