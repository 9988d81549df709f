//! Colours of the regions on the page: those of [`regions::colour`], as in reports and plots.
//!
//! The page gets the name of a class for each region, because its policy forbids inline styles. The style sheet has each class
//! with the shade for light and the one for dark pages.

use std::collections::BTreeMap;

use regions::catalogue::Catalogue;
use regions::colour::{self, RegionColour};

/// Returns the class of each region of the catalogue.
pub fn classes(catalogue: &Catalogue) -> BTreeMap<&str, String> {
    catalogue.iter().map(|(_, region)| (region.id.as_str(), class(colour::of(&region.id)))).collect()
}

fn class(colour: RegionColour) -> String {
    colour.light.replace('#', "c-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assets;

    #[test]
    fn the_style_sheet_has_the_colours_of_reports() {
        let sheet = std::str::from_utf8(assets::find("/console.css").unwrap().body).unwrap();
        for colour in colour::PALETTE {
            let RegionColour { light, dark } = colour;
            let rule = format!(".{} {{ --c: light-dark({light}, {dark}); }}", class(colour));
            assert!(sheet.contains(&rule), "{rule}");
        }
    }

    #[test]
    fn a_region_has_the_class_of_its_colour() {
        let catalogue = Catalogue::builtin();
        let classes = classes(&catalogue);
        assert_eq!(classes.len(), catalogue.iter().count());
        assert_eq!(classes["gcp/europe-west4"], "c-b97500");
    }
}
