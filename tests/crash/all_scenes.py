"""Every scene, by its name."""

from __future__ import annotations

from typing import Final

from tests.crash import replication_scenes, scenes, storage_scenes
from tests.crash.scenes import Scene

SCENES: Final[dict[str, type[Scene]]] = {
    scene.name: scene
    for scene in (
        scenes.Save,
        scenes.Replace,
        scenes.Finalize,
        scenes.Retention,
        scenes.CommitOfLeader,
        scenes.CommitOfOther,
        scenes.CommitOnOneNode,
        scenes.Recovery,
        storage_scenes.Draining,
        replication_scenes.ReplicationLeader,
        replication_scenes.ReplicationOther,
        replication_scenes.RecoveryFromPeer,
    )
}
