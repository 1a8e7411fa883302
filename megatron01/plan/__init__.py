"""What a run will do, computed before it starts: when it synchronizes, and what each step sends."""
