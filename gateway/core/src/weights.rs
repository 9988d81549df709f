//! What the plan says of requests like this one: the rows of this gateway, found without a search and without an allocation.
//!
//! A row is of a deployment, an origin and a law. A request looks for the row of its own law, and where it asks for less
//! than any row says (its header narrows its residency in a way that nobody has asked for before), the row of the least
//! law that contains its own will do: whoever draws leaves out the regions that may not see it, as everywhere.
//!
//! See [`regions::weights`] for what is drawn and for what stands above it.

use regions::catalogue::Catalogue;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::route::Generation;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::Share;
use std::collections::BTreeMap;

/// A gateway's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// How new they are.
    pub generation: Generation,
    rows: BTreeMap<DeploymentName, Vec<Row>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    origin: RegionIndex,
    permitted: RegionSet,
    shares: Box<[Share]>,
}

/// A row as it is told: for what, under which law, from where, and how it is divided.
pub type Told = (DeploymentName, ResidencyPolicy, RegionIndex, Box<[Share]>);

impl Weights {
    /// These rows, with their laws worked out.
    pub fn new(
        generation: Generation,
        told: impl IntoIterator<Item = Told>,
        catalogue: &Catalogue,
    ) -> Weights {
        let mut rows: BTreeMap<DeploymentName, Vec<Row>> = BTreeMap::new();
        for (deployment, residency, origin, shares) in told {
            let row = Row { origin, permitted: residency.permitted(catalogue), shares };
            rows.entry(deployment).or_default().push(row);
        }
        // The narrowest first, so that the first that contains a law is the least that does.
        rows.values_mut().for_each(|rows| rows.sort_by_key(|row| row.permitted.len()));
        Weights { generation, rows }
    }

    /// How requests for `deployment` from `origin` that may go to `allowed` are divided; not at all, where the plan does not
    /// say.
    pub fn of(&self, deployment: &DeploymentName, origin: RegionIndex, allowed: &RegionSet) -> &[Share] {
        let rows = self.rows.get(deployment).map_or(&[][..], Vec::as_slice);
        let found = rows.iter().find(|row| row.origin == origin && allowed.is_subset(&row.permitted));
        found.map_or(&[], |row| &row.shares)
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.rows.values().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::weights::Why;

    #[test]
    fn a_request_finds_the_row_of_the_least_law_that_contains_its_own() {
        let catalogue = Catalogue::builtin();
        let at = |id: &str| catalogue.index_of(&id.parse().unwrap()).unwrap();
        let (america, europe, tokyo) = (at("aws/us-east-1"), at("gcp/europe-west4"), at("oci/ap-tokyo-1"));
        let name = |text: &str| text.parse::<DeploymentName>().unwrap();
        let law = |text: &str| text.parse::<ResidencyPolicy>().unwrap();
        let to = |region| [Share { region, permille: 1000, why: Why::Nearest }];
        let row = |deployment: &str, residency: &str, origin, region| -> Told {
            (name(deployment), law(residency), origin, Box::new(to(region)))
        };
        let told = [
            row("d", "anywhere", america, america),
            row("d", "eu", america, europe),
            row("d", "anywhere", tokyo, tokyo),
        ];
        let weights = Weights::new(Generation { epoch: 1, number: 7 }, told, &catalogue);
        let find = |deployment: &str, origin, residency: &str| {
            weights.of(&name(deployment), origin, &law(residency).permitted(&catalogue)).to_vec()
        };
        assert_eq!(find("d", america, "anywhere"), to(america));
        assert_eq!(find("d", america, "eu"), to(europe));
        assert_eq!(find("d", america, "de,fr"), to(europe), "a law of its own within the narrower");
        assert_eq!(find("d", america, "us"), to(america));
        assert_eq!(find("d", tokyo, "eu"), to(tokyo));
        assert_eq!(find("d", europe, "eu"), []);
        assert_eq!(find("e", america, "eu"), []);
        assert_eq!(weights.rows(), 3);
    }
}
