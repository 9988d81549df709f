//! Certificates of a local fleet, from the authority of its hubs: each process joins with a token, as in a fleet over several
//! clouds (`docs/pki.md`).
//!
//! Authority and certificates are new at each start, since the addresses of the hubs are.

use crate::pki;
use anyhow::{Context, Result, anyhow};
use identity::OwnName;
use regions::catalogue::{Catalogue, Region};
use regions::id::RegionId;
use regions::spiffe::Role;
use resolver::{DnsSection, Resolver};
use scheduler::hub::backup;
use scheduler::hub::pki::init::{self, AuthorityFolders, NewAuthority};
use scheduler_api::VERSION;
use scheduler_api::pki::NewTokenV1;
use scheduler_client::authority::{self, AuthorityConnection};
use scheduler_client::identity_folder::IdentityFolder;
use scheduler_client::unix_time;
use scheduler_core::pki::issue::VALIDITY_MAX;
use scheduler_core::pki::token::{JoinToken, TTL_MIN};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Trust domain of a local fleet.
const TRUST_DOMAIN: &str = "up.meridian.internal";
/// Name of the operator, and of the viewer.
const PERSON: &str = "local";
/// Directory of the replicas that spokes start, with their identities.
pub(super) const REPLICAS: &str = "replicas";
/// Time limit for the authority to respond after its hub has started.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Authority of a local fleet.
pub(super) struct FleetAuthority {
    /// Folders of the authority, and of the first hub and the operator.
    folders: AuthorityFolders,
    /// Directory of the identities of other processes.
    identities: PathBuf,
    /// Listeners of the authority: one for each hub.
    addresses: Vec<SocketAddr>,
}

/// Identity with which a process joins the fleet.
#[derive(Clone, Debug)]
pub(super) struct MemberIdentity {
    pub(super) dir: PathBuf,
    pub(super) role: Role,
    pub(super) region: RegionId,
}

impl FleetAuthority {
    /// Creates an authority in `dir`, and the identities of the first hub and of the operator.
    pub(super) fn create(
        dir: &Path,
        region: &RegionId,
        catalogue: &Catalogue,
        addresses: Vec<SocketAddr>,
    ) -> Result<FleetAuthority> {
        let (pki, identities) = (dir.join("pki"), dir.join("identities"));
        // The replicas that a spoke starts have no state that a new fleet could use.
        for former in [&pki, &identities, &dir.join(REPLICAS)] {
            if former.exists() {
                fs::remove_dir_all(former)
                    .with_context(|| format!("{} cannot be deleted", former.display()))?;
            }
        }
        let request = NewAuthority {
            dir: &pki,
            domain: TRUST_DOMAIN,
            region,
            operator: PERSON,
            operator_validity: VALIDITY_MAX,
            addresses: addresses.iter().map(ToString::to_string).collect(),
            catalogue,
        };
        let folders = init::create(&request, unix_time()).map_err(|problem| anyhow!(problem))?;
        Ok(FleetAuthority { folders, identities, addresses })
    }

    /// Deletes the former authority from the embedded store of the hub.
    pub(super) async fn replace_former(&self, data: &Path) -> Result<()> {
        backup::delete_authority(data).await.context("the store of the hub cannot be used")
    }

    /// Returns the folder of the authority's certificate and key.
    pub(super) fn dir(&self) -> &Path {
        &self.folders.authority
    }

    /// Returns the identity folder of the first hub.
    pub(super) fn first_hub(&self) -> &Path {
        &self.folders.hub
    }

    /// Returns the identity folder of the operator.
    pub(super) fn operator(&self) -> &Path {
        &self.folders.operator
    }

    /// Returns the address of the authority's listener of a hub.
    pub(super) fn address(&self, hub: usize) -> SocketAddr {
        self.addresses[hub]
    }

    /// Returns the identity of the process `name`, which joins when it is started.
    pub(super) fn member(&self, name: &str, role: Role, region: &Region) -> MemberIdentity {
        MemberIdentity { dir: self.identities.join(name), role, region: region.id.clone() }
    }

    /// Creates the join token of a process.
    pub(super) async fn token(&self, member: &MemberIdentity) -> Result<JoinToken> {
        self.create_token(member.role, Some(&member.region)).await
    }

    /// Issues the identity of a viewer, beside that of the operator.
    pub(super) async fn issue_viewer(&self) -> Result<()> {
        let token = self.create_token(Role::Viewer, None).await?;
        let folder = IdentityFolder::new(self.operator().with_file_name(Role::Viewer.as_str()));
        let own = OwnName { roles: &[Role::Viewer], region: None };
        authority::join(&folder, &token, &own, &Resolver::new(&DnsSection::default())).await?;
        Ok(())
    }

    async fn create_token(&self, role: Role, region: Option<&RegionId>) -> Result<JoinToken> {
        let folder = IdentityFolder::new(self.operator());
        let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        let is_person = !role.is_process();
        let request = NewTokenV1 {
            version: VERSION,
            role: role.to_string(),
            region: region.map(RegionId::to_string),
            name: is_person.then(|| PERSON.to_owned()),
            ttl_s: TTL_MIN.as_secs(),
            validity_s: is_person.then_some(VALIDITY_MAX.as_secs()),
        };
        let resolver = Resolver::new(&DnsSection::default());
        let begun = Instant::now();
        loop {
            let created = async {
                let connected = AuthorityConnection::with_identity(&folder, &addresses, &resolver);
                let mut connection = connected.await?;
                pki::create(&mut connection, addresses.clone(), &request).await
            };
            match created.await {
                Ok((token, _)) => return Ok(token),
                // A hub starts its authority after its listener.
                Err(_) if begun.elapsed() < READY_TIMEOUT => tokio::time::sleep(RETRY_PAUSE).await,
                Err(error) => return Err(anyhow!("no join token for a {role}: {error}")),
            }
        }
    }
}
