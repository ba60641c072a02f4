"""The computing column: carries out plans. It schedules nothing and holds nothing that can't be rebuilt."""
