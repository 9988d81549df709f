//! The hop between edge and region: TLS 1.3, with a certificate at either end.
//!
//! Between an edge and a region lies whatever network there is, between clouds and over oceans, and a request on it is a
//! tenant's text. So both prove who they are before a byte of one is written: the region that it is the region which the
//! request was allowed to go to, in the jurisdiction that the catalogue has it in, and the edge that it is a gateway. A
//! name is a SPIFFE ID ([`gateway_core::spiffe`]); who may give names is an authority in a file ([`anchors`]). The address at
//! which a region is found comes from the hub, which nothing here has to trust: who answers there and is somebody else is
//! turned away.
//!
//! ```text
//!  edge                                          region's door
//!  Outward  ── TCP ── TLS 1.3 handshake ──────▶  Doorkeeper
//!     region_ca: is it a region of ours?            client_ca: is it a gateway of ours?
//!     the one that was meant? under which residency policy?
//!  residency::send  ── request ──────────────────▶  Ingress
//! ```
//!
//! TLS is done by rustls and below the exchange ([`crate::plain`]), which does not know of it. Connections are kept, and
//! sessions are resumed: a connection that is opened anew costs a round trip more than in the clear, and no signature.
//! A resumed session is looked at like a new one, chain, times and name, because tickets outlive certificates.
//!
//! Certificates, keys and authorities are followed as those for clients are ([`crate::tls`]): what is renewed is taken
//! without a restart, what is wrong is told and left.
//!
//! Behind the door the request goes on in the clear, to replicas of the same region.

mod anchors;
mod cause;
mod doorkeeper;
mod outward;
mod verify;

pub(crate) use cause::Cause;
pub(crate) use doorkeeper::{Doorkeeper, HANDSHAKE_RECORD};
pub(crate) use outward::{Greeted, Outward};

use crate::tls::Identity;
use anchors::Anchors;
use gateway_core::spiffe::{Role, SpiffeId};
use regions::catalogue::Catalogue;
use regions::id::RegionId;
use rustls::pki_types::CertificateDer;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use verify::name_in;

/// What is spoken inside: many requests at once on each connection, or one after the other.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// How an edge speaks to regions.
#[derive(Clone, Debug)]
pub enum Regions {
    /// In the clear, and only to regions on this machine: nobody has said anything else.
    OnThisMachine,
    /// In the clear, because the configuration says so.
    InTheClear,
    /// Over TLS, with these.
    Tls(Arc<Credentials>),
}

/// `[region_tls]`, as written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawRegionTls {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    region_ca: Option<PathBuf>,
    #[serde(default)]
    insecure: bool,
}

impl Regions {
    /// Reads the table and the files that it names, for a gateway beside `place`.
    pub(crate) fn read(
        raw: Option<RawRegionTls>,
        base: &Path,
        place: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Regions, Vec<String>> {
        let Some(RawRegionTls { certificate, key, region_ca, insecure }) = raw else {
            return Ok(Regions::OnThisMachine);
        };
        match (certificate, key, region_ca, insecure) {
            (None, None, None, true) => Ok(Regions::InTheClear),
            (Some(certificate), Some(key), Some(ca), false) => {
                let files =
                    Files { certificate: base.join(certificate), key: base.join(key), ca: base.join(ca) };
                Credentials::of_gateway(files, place, catalogue).map(|read| Regions::Tls(Arc::new(read)))
            }
            _ => Err(vec![
                "[region_tls] needs certificate, key and region_ca, or insecure = true and none of them"
                    .to_owned(),
            ]),
        }
    }
}

/// The files of one end.
pub struct Files {
    /// Its own certificate, with what leads from there to its authority.
    pub certificate: PathBuf,
    /// The key of that.
    pub key: PathBuf,
    /// The authorities that may name those at the other end.
    pub ca: PathBuf,
}

/// What one end shows, and whom it believes.
#[derive(Debug)]
pub struct Credentials {
    identity: Arc<Identity>,
    anchors: Arc<Anchors>,
    own: SpiffeId,
    catalogue: Arc<Catalogue>,
}

impl Credentials {
    /// Of a gateway that stands beside `place`.
    ///
    /// # Errors
    ///
    /// What is wrong with each of the files.
    pub fn of_gateway(
        files: Files,
        place: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Credentials, Vec<String>> {
        Credentials::load(Role::Gateway, ("region_tls", "region_ca"), files, place, catalogue)
    }

    /// Of the door of `region`.
    ///
    /// # Errors
    ///
    /// What is wrong with each of the files.
    pub fn of_region(
        files: Files,
        region: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Credentials, Vec<String>> {
        Credentials::load(Role::Region, ("tls", "client_ca"), files, region, catalogue)
    }

    fn load(
        role: Role,
        (table, ca_key): (&'static str, &'static str),
        files: Files,
        region: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Credentials, Vec<String>> {
        let Files { certificate, key, ca } = files;
        let (meant, known) = (region.clone(), catalogue.clone());
        let own =
            move |certificate: &CertificateDer<'_>| own_name(certificate, role, &meant, &known).map(|_| ());
        let identity = Identity::load_where(table, certificate, key, own);
        let anchors = Anchors::load(table, ca_key, ca);
        match (identity, anchors) {
            (Ok(identity), Ok(anchors)) => Ok(Credentials {
                own: own_name(&identity.shown().cert[0], role, region, catalogue)
                    .expect("a certificate is taken if this holds of it"),
                identity: Arc::new(identity),
                anchors: Arc::new(anchors),
                catalogue: catalogue.clone(),
            }),
            (identity, anchors) => {
                let mut problems = identity.err().unwrap_or_default();
                problems.extend(anchors.err());
                Err(problems)
            }
        }
    }

    /// Follows the files for ever.
    pub(crate) async fn follow(self: Arc<Credentials>) {
        tokio::join!(self.identity.clone().follow(), self.anchors.clone().follow());
    }
}

/// The name in one's own certificate, which others will want to read.
fn own_name(
    certificate: &CertificateDer<'_>,
    role: Role,
    region: &RegionId,
    catalogue: &Catalogue,
) -> Result<SpiffeId, String> {
    let wanted = || {
        let within = catalogue.get(region).map_or("…", |region| region.narrowest().as_str());
        format!("spiffe://TRUST-DOMAIN/{}/{region}/in/{within}", role.as_str())
    };
    let meant =
        catalogue.index_of(region).ok_or_else(|| format!("is of {region}, which is in no catalogue"))?;
    name_in(certificate)
        .and_then(|own| own.verify_region(meant, role, &own, catalogue).map(|()| own))
        .map_err(|wrong| {
            format!("is not that of this {}: {wrong}; its one URI has to be {}", role.as_str(), wanted())
        })
}

#[cfg(test)]
mod tests;
