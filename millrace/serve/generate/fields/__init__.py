"""Fields that requests of every dialect have."""
