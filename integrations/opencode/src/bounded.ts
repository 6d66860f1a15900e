/** Maps that never grow past a size: the entry written longest ago makes room. */

export function put<K, V>(map: Map<K, V>, key: K, value: V, kept: number): void {
  map.delete(key)
  map.set(key, value)
  for (const oldest of map.keys()) {
    if (map.size <= kept) return
    map.delete(oldest)
  }
}
