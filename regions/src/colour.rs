//! Colour of a region in reports and plots.
//!
//! A region has one colour on all pages of `meridian load --html` and `meridian drill --html` and in the console, so that a
//! reader recognizes it from report to report. The colour depends on the name alone: not on the order in which regions occur, nor on the other
//! regions of a page. The palette has twelve hues in two shades of the OKLCH colour space, each with a variant for light
//! and for dark pages (contrast above 3:1). Two regions of the catalogue may have the same colour, so pages also label what
//! they draw.

use crate::id::RegionId;

/// Colour of a region, as CSS hexadecimal values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionColour {
    /// On a light background.
    pub light: &'static str,
    /// On a dark background.
    pub dark: &'static str,
}

/// Start value of the hash. Found by a search over start values: with it the regions of `meridian up` and of the shipped
/// drills have different colours (a test of `meridian up` checks it), and the three of a default fleet have hues that are
/// at least 90° apart.
const SEED: u32 = 428_738;

/// Multiplier of the 32-bit FNV-1a hash.
const FNV_PRIME: u32 = 0x0100_0193;

/// All colours: twelve hues, each in a deep and a medium shade.
pub const PALETTE: [RegionColour; 24] = [
    RegionColour { light: "#045797", dark: "#89c3ff" },
    RegionColour { light: "#1289e7", dark: "#319cfc" },
    RegionColour { light: "#4841af", dark: "#b1b7fd" },
    RegionColour { light: "#7575e9", dark: "#8688fe" },
    RegionColour { light: "#722f9a", dark: "#d7a6fc" },
    RegionColour { light: "#a564d1", dark: "#b876e5" },
    RegionColour { light: "#8d1e72", dark: "#f59cd8" },
    RegionColour { light: "#c656a6", dark: "#da69b9" },
    RegionColour { light: "#9c113f", dark: "#fe9ead" },
    RegionColour { light: "#d7506e", dark: "#ec6480" },
    RegionColour { light: "#923002", dark: "#fda485" },
    RegionColour { light: "#d75928", dark: "#ec6d3d" },
    RegionColour { light: "#764a05", dark: "#f3ae58" },
    RegionColour { light: "#b97500", dark: "#d0860b" },
    RegionColour { light: "#625600", dark: "#d1bf53" },
    RegionColour { light: "#988710", dark: "#ad9907" },
    RegionColour { light: "#3e6102", dark: "#a2ce72" },
    RegionColour { light: "#649806", dark: "#74ac23" },
    RegionColour { light: "#056641", dark: "#68d7a1" },
    RegionColour { light: "#019f68", dark: "#15b477" },
    RegionColour { light: "#0a625e", dark: "#2fd8d0" },
    RegionColour { light: "#0e9a94", dark: "#12aea8" },
    RegionColour { light: "#065f74", dark: "#40d1f7" },
    RegionColour { light: "#1195b4", dark: "#17a9cb" },
];

/// Returns the colour of a region.
pub fn of(region: &RegionId) -> RegionColour {
    let bytes = region.as_str().bytes();
    let hash = bytes.fold(SEED, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(FNV_PRIME));
    // The low bits of FNV depend on few bits of its input; this mixes in the high ones.
    let hash = (hash ^ hash >> 16).wrapping_mul(0x045d_9f3b);
    PALETTE[(hash ^ hash >> 16) as usize % PALETTE.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn colour(name: &str) -> RegionColour {
        of(&name.parse().expect("a region"))
    }

    /// A changed colour would make old and new reports incomparable.
    #[test]
    fn the_colour_of_a_name_is_stable() {
        assert_eq!(colour("aws/us-east-1"), RegionColour { light: "#c656a6", dark: "#da69b9" });
        assert_eq!(colour("gcp/europe-west4"), RegionColour { light: "#b97500", dark: "#d0860b" });
        assert_eq!(colour("oci/ap-tokyo-1"), RegionColour { light: "#1289e7", dark: "#319cfc" });
    }
}
