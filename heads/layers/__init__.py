"""What EAGLE and block heads share: decoder layers, rotary positions, attention in
training, the cache, starting weights."""
