"""What every kernel stands on: the build, launches, scratch memory, operations, PTX wrappers."""
