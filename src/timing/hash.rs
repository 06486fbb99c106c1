//! A hash for keys of our own making: positions, counts and bits of numbers. Nobody outside can
//! choose them to collide, and they are looked up in every step.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map with number keys.
pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<MixBits>>;

/// One multiplication per number, its two halves folded.
#[derive(Debug, Clone, Copy, Default)]
pub struct MixBits(u64);

impl Hasher for MixBits {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(u64::from(number));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        // Added to, not just mixed with, so that neither zeros nor repetitions vanish.
        let mixed = self
            .0
            .wrapping_add(number)
            .wrapping_add(0x243f_6a88_85a3_08d3);
        let product = u128::from(mixed) * u128::from(0x9e37_79b9_7f4a_7c15_u64);
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
